"""Contains the package's operators, one module each. Importing a module loads its library."""
