"""The package's operators, one module each, whose library is loaded when the module is imported."""
