"""What training will take on devices that are not there."""
