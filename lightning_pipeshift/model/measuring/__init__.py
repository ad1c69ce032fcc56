"""What layers cost: their seconds and their bytes."""
