"""The command line: one verb a file; each parses, calls the library, and reports."""
