MESSAGES=[{"role":"user","content":"x"}]
def templates():
    return []
