"""Bookkeeping of KV block *ids*: who holds which block, what each cached block contains. No arrays, no compute.

``kv_cache_manager.KVCacheManager`` is the only door; the other modules are its parts.
"""
