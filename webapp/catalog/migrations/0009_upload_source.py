"""Uploads that the service fetches by itself."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("catalog", "0008_linked_models")]

    operations = [migrations.AddField(model_name="upload", name="source", field=models.JSONField(default=dict))]
