"""What the server and the devices speak of: parameters, units and maps of sub-models, tasks and updates."""
