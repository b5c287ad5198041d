"""Parts of apex's contrib that scripts use, on torch's operators; import each by its own name."""
