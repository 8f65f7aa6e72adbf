"""How many times more a baseline must spend to reach our loss."""
