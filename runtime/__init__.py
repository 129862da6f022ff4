"""What happens once programs exist: execution, transport, simulation."""
