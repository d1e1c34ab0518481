"""What a run would take: parameters, operations, memory and disk, counted, and time, measured."""
