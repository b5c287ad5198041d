"""apex in other libraries; each module needs the library after which it is named."""
