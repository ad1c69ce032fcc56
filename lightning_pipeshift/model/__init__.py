"""What PipeShift does to a LightningModule. Imports torch, and not Lightning."""
