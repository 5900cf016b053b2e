"""How simulated devices train."""
