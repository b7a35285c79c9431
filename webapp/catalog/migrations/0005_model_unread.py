"""What a model's config.json asked for that is in no price. Of models from before it is not known; nothing is said."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("catalog", "0004_deletion_and_uploads")]

    operations = [
        migrations.AddField(model_name="model", name="unread", field=models.JSONField(default=list)),
    ]
