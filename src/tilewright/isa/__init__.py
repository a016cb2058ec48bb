"""Machine code of chips that are not here: compiled, counted, and AMD's executed on the CPU."""
