"""Where Lightning's hooks meet PipeShift: each hook delegates to the runtime."""
