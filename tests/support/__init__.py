"""What tests share: small models, ranks, servers, hosts and files."""
