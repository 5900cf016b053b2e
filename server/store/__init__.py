"""Where the server keeps what it has acknowledged. Known to `server` alone."""
