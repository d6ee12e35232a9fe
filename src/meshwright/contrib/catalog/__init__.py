"""Look up what Meshwright comes with: presets, published models, chips and their prices, number formats.

Imports: all of the core. Used by: users, through `meshwright presets`, `init`, `fleets` and `formats`.
"""
