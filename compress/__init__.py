"""L1, pure: codecs of model updates."""
