"""Plan and run synchronous hybrid-parallel training of any PyTorch model."""
