"""What spmd is measured against: the same training step, written for ranks with other means."""
