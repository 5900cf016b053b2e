"""Central differential privacy: what it costs, bounded contributions, secret noise."""
