"""Parts of the modules that tests of operators are built on."""
