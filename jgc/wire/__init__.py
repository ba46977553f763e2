"""What a payload costs: message sizes, position coding, and the collectives of a compiled program."""
