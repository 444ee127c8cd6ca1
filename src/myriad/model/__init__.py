"""The transformer on one device. Its description (``myriad.model.config``) needs no torch."""
