"""How many times more a baseline must spend to reach our loss, and the real text that this is measured on."""
