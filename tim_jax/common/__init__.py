"""What every room uses: errors, types, reading of input, waiting, the machine."""
