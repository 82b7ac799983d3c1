"""One class of tests for each operation; a back end inherits it and names itself."""
