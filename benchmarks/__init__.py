"""What PipeShift costs and what it saves, measured side by side with what it competes with."""
