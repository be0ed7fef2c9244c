"""Makes a model's steps faster; each module says what it gains and which switch of `EngineConfig` turns it off."""
