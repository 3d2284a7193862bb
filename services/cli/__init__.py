"""What operators type: start the system here, submit jobs anywhere, watch them."""
