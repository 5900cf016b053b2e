"""Who is who: an authority of our own, certificates for devices, operators and the server, signatures."""
