"""What a run can be asked for: sections, checked values, TOML."""
