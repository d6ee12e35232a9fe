"""A function named `package.module:function` that makes a module and its inputs, for the command line."""
