"""Parts of apex's contrib that scripts use, with torch's operators."""
