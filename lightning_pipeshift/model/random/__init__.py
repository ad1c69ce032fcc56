"""Random streams, which do not depend on where a layer is."""
