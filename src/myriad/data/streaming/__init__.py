"""Text that is tokenized during training, from files that no command has prepared."""
