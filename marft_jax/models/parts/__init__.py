"""Parts of a layer: mixers and mlps, and the protocol that they follow."""
