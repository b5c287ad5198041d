"""Support for other libraries. Each module requires the library that it is named after."""
