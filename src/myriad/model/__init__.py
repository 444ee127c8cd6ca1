"""The transformer, as one device sees it. Describing one (``myriad.model.config``) needs no torch."""
