"""What a request owns: explicit pytrees that steps take and return."""
