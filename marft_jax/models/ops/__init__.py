"""Operations that platforms compute differently: attention, products, reductions, cache writes."""
