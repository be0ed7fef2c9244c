"""`assay score`: scores files of records through a running service."""
