"""A Flower app, for Flower and for us: devices that send back what they get, or train on digits."""
