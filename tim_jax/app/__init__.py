"""The application: configuration, run folders, jobs, and the command line."""
