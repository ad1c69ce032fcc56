"""The core: values, and the steps of one microbatch."""
