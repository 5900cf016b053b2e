"""The server's machine: who gets a task, what becomes of an update, what a version is."""
