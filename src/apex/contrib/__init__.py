"""Parts of apex's contrib that scripts use, with torch's operators; import each by its name."""
