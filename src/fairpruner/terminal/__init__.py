"""The terminal: tables, progress bars, Ctrl-C and SIGTERM."""
