"""The one place that knows what a stream, an event, a pinned buffer and a peer copy are."""
