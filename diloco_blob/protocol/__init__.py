"""Key names, records, the round and its policy: what the objects in the bucket mean. No torch."""
