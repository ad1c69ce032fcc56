"""Changes to a LightningModule that make it run on several stages. Imports torch, and not
Lightning.
"""
