"""What a step does many times alike is captured once, and its nodes are written again for the others."""
